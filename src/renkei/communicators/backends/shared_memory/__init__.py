"""The backend for the ranks of one host on CPUs: they read and write one another's memory.

Follow a sum: in `transport`, ranks meet and say what they call; `meeting` is how they wait for one another; `memory` is
what they share; `reduction` adds it, each rank its slice. `mesh` connects them to begin with, and shows when one ends.
Messages from one rank to another go by `mail`.
"""
