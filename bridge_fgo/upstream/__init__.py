"""Adapters that drive mcore's own offloaders through the protocol of `bridge_fgo.engine.offloader`."""
