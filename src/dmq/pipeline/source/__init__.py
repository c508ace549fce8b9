"""Source: `columns`, `data_source`, `filters`, `offsets`, `options`, `partition_plan`, `partition_reader`,
`resolver`."""
