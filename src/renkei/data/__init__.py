"""From a dataset to this rank's batches.

`sharding` is the arithmetic, `streams` the random numbers, `scatter` the datasets that ranks share, `loader` the loop's
source of batches, `datasets` some datasets.
"""
