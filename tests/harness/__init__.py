"""The harness: arms, processes that each train once and write what happened, and the demos and the bench that run them.

It lies in a checkout alone and imports `bridge_fgo`, which does not import it. `tests/` has to be on the path.
"""
