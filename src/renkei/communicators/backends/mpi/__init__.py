"""The backend over MPI, by mpi4py.

Follow a sum: `meeting` lets ranks agree that all can use MPI, which `implementation` has loaded; `transport` begins it,
by MPI's own operation or, for 16-bit floats, by ours (`arithmetic` says which), on `memory` as MPI takes it; `requests`
asks MPI until it is done, as often as `pace` says. Messages from one rank to another are `messages`. MPI doesn't tell
when a rank has left; `farewells` do. `rendezvous` is for those who start torch by `init_method="renkei-mpi://"`.
"""
