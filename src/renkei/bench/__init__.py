"""Measuring Renkei against its peers: in one run, in turns, each at its best."""
