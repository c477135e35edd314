"""Batches to gradients: the Trainer, its Megatron-Core ranks, losses and advantages.

The middle layer. It knows batches, not prompts, and imports only `engine`.
"""
