"""Pretraining recipes on Megatron-Bridge's own recipe builders, and how to launch them with NeMo-Run.

In a checkout this folder is `recipes`, and also `bridge_fgo.recipes` by a link; in the wheel it is
`bridge_fgo.recipes` alone, because other packages put a `recipes` of their own into site-packages. Modules
here import each other by the second name, so that nothing is loaded twice.

Importing this package imports neither torch nor Megatron nor NeMo-Run.
"""
