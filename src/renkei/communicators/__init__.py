"""Who talks to whom, over what, and how tensors are added.

`communicator` is the abstract idea; `naive`, `flat` and `null` fill its one hole; `factory` makes one for this process.
"""
