"""Stands in for vLLM in another process: transformers behind the few of vLLM's calls that questkv.benchmark makes."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

print("a library that prints to standard output")


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, dtype, max_model_len, kv_cache_memory_bytes, skip_tokenizer_init, **options):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.room, self.running, self.known = max_model_len, None, 0
        self.llm_engine = self

    def add_request(self, name, prompt, parameters):
        assert self.running is None, "one request at a time"
        ids = prompt["prompt_token_ids"]
        assert len(ids) + parameters.max_tokens <= self.room
        # the prompt takes two steps unless the prefix cache has its beginning
        self.running, self.wait = (name, list(ids), [], parameters), len(ids) > self.known + 100
        self.known = max(self.known, len(ids))

    def abort_request(self, names):
        if self.running is not None and self.running[0] in names:
            self.running = None

    def reset_prefix_cache(self):
        self.known = 0

    def has_unfinished_requests(self):
        return self.running is not None

    def step(self):
        if self.wait:
            self.wait = False
            return []
        _, ids, made, parameters = self.running
        with torch.no_grad():
            logits = self.model(torch.tensor([ids + made])).logits[0, -1].log_softmax(-1)
        made.append(int(logits.argmax()))
        if len(made) == parameters.max_tokens:
            self.running = None
        every = {i: SimpleNamespace(logprob=float(v)) for i, v in enumerate(logits)}
        logprobs = [every] if parameters.logprobs == -1 else None
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(made), logprobs=logprobs)])]
