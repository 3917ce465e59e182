"""The networks that recipes and benchmarks train."""
