"""Producer: `accumulator`, `core`, `encoder`, `future`, `message`, `outcome`, `producer`, `retry_policy`, `routes`,
`sender`, `stream`, `transaction`, `transaction_core`."""
