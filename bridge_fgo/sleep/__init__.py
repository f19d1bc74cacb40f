"""Phases: parameters, gradients and optimizer state leave a shared GPU apart, and come back apart.

In reinforcement learning on shared GPUs the trainer hands its GPU to the inference engine between updates. Three kinds
of memory leave, each in its own way:

- Gradients (DDP's buffers, `extra_main_grads`) are dropped, and return as zeros. With "keep" they are copied.
- Parameters in DDP's buffers are dropped where their masters tell them, and rounded from these when they return. Else
  a rank copies its own shard, and the ranks all-gather. Frozen parameters and models without DDP are copied.
- Optimizer state is copied by the rank's engine, slab by slab.

Buffers that others hold views of are emptied in place and never rebound: parameters, `main_grad`, buckets and shards
are the same objects after a wake. What has not changed since its newest copy, by a sum over its bytes, is not copied
again.

Time line of `Residency.offload`, whatever the order of its arguments:

1. Everything that may be refused is refused, and host memory is found. Nothing has moved.
2. Collectives in flight (`overlap_param_gather`, `overlap_grad_reduce`) are waited for.
3. Masters are compared with the weights that they round to, while both are on the GPU.
4. The optimizer's slabs leave, through the engine. Packed masters need their weights, so these are woken first.
5. Weights that are not told by masters, and kept gradients, are copied out.
6. The host waits for all copies. Then storages are emptied, and the allocator's cache goes to the driver. So do caches
   and workspaces that nothing on the GPU can need any more (`caches`).

Time line of `Residency.reload`: gradients' storages are filled with zeros; the optimizer's slabs come back; parameters
are rounded from masters, or copied in and all-gathered, and columnwise copies of FP8 ones are made (`quantized`). Where
packed masters need weights, parameters come first.

`residency.Residency` has these verbs. The public class, in `bridge.residency`, adds checkpoints while asleep and
training steps, for which installed patches serve the optimizer.
"""
