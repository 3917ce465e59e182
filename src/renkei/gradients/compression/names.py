"""The names of wire formats, which whoever reads settings can check without torch."""

WIRES = ("fp32", "bf16", "fp16", "int8", "power_sgd")
AUTO = "auto"  # none of them: an optimizer chooses by what it measures
