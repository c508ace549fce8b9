"""Consumer: `consumer`, `core`, `delivery`, `duplicates`, `executor`, `follow`, `handler`, `message`, `options`,
`prefetch`, `strategy`, `subscription`."""
