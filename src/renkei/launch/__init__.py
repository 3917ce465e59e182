"""How processes come to be, and how each finds out which one it is.

`environments` reads what a launcher said, `rendezvous` brings the processes together, `local` starts them on this host
and `child` is what each of those runs first. Nothing here imports torch, so starting and refusing are quick.
"""
