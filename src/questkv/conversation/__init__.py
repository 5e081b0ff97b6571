"""Conversations in a model's own form and tokens: what `questkv ask` and the evaluation tasks share."""
