"""Gradients on their way out: packed into buckets, sent as they become ready, summed, given back.

Nothing here knows how a message travels; `Carrier` in `exchange` says what is asked of whoever carries it.
"""
