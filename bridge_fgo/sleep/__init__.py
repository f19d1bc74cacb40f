"""Sleep: offload and reload parameters, gradients and optimizer state of a shared GPU, each by itself.

In reinforcement learning on shared GPUs the trainer hands its GPU to the inference engine between updates. Three kinds
of memory move, each in its own way:

- Gradients (`gradient_offloader`: DDP's buffers, `extra_main_grads`) are dropped, and zeroed on reload. With "keep"
  they are copied. Buckets that training manages have no memory after a reload either, until a backward needs it.
- Parameters (`weight_offloader`) in DDP's buffers are dropped if masters round to them (`rounding`), and rounded again
  on reload. Otherwise each rank copies its own shard, and the ranks all-gather. Frozen parameters and models without
  DDP are copied.
- Optimizer state (`state_offloader`) is copied by the rank's engine, slab by slab.

Buffers that others hold views of are emptied in place and never rebound: parameters, `main_grad`, buckets and shards
are the same objects after a reload. What has not changed since its newest copy, by a sum over its bytes, is not copied
again.

Time line of `Residency.offload`, whatever the order of its arguments:

1. Refuse what cannot move, and find host memory. Nothing has moved.
2. Wait for collectives in flight (`overlap_param_gather`, `overlap_grad_reduce`).
3. Compare masters with the weights that they round to, while both are on the GPU.
4. Offload the optimizer's slabs, through the engine. Packed masters need their weights, so these are reloaded first.
5. Copy out weights to which no masters round, and kept gradients.
6. Wait for all copies on the host. Then empty the storages, and return the allocator's cache to the driver, with caches
   and workspaces that nothing on the GPU can need any more (`caches`).

Time line of `Residency.reload`: start to reload the optimizer's slabs; zero the gradients; round parameters from
masters, or copy them in and all-gather, and make columnwise copies of FP8 ones (`quantized`). Where packed masters need
weights, parameters are first.

A tensor that is away guards itself (`memory.guard`); `checks` refuses what its guard cannot catch in time.

`weight_sets` keeps several weights of a model on the host, and swaps one into its parameters for a block.

The public class, `bridge.residency.Residency`, has these verbs, and checkpoints while asleep and training steps, for
which installed patches serve the optimizer. `bridge.frameworks` has other frameworks' functions call `Residency`.
"""
