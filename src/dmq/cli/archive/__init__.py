"""Archive: `commands`, `options`, `query`, `replay`, `report`."""
