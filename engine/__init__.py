"""Weights and tokens: layouts, plan, buckets, publisher, receiver, generator, workers, seeds.

The lowest layer. It knows weights and token ids, not rewards, prompts or batches.
"""
