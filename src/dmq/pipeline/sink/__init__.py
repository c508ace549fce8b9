"""Sink: `data_writer`, `encoder`, `lane_sender`, `options`, `resume`, `row_blocks`."""
