"""How gradients travel: as they are, or in fewer bytes.

A `codec` says how 32-bit floats become bytes and back; `sixteen_bits` and `int8` are two kinds. A `wire` carries one
bucket, and keeps what was lost on the way to give it along with the next gradient. `power_sgd` is a wire, too,
which sends the factors of a matrix of low rank. What a wire remembers counts once the step was made (`tentative`).
`formats` are what a user names.
"""
