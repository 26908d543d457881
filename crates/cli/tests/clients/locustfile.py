"""Load by locust: chats without protection, and among them one protected question, whose answer must not change."""

import os

from locust import FastHttpUser, between, task


class Reader(FastHttpUser):
    host = os.environ["BLOCKLOCK_URL"]
    wait_time = between(0, 0.02)
    answer = None

    def ask(self, text, protection, tokens):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "seed": 3, "protection": protection,
                "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "logit_bits": True}
        with self.rest("POST", "/v1/chat/completions", json=body, name=protection) as reply:
            return reply.js and reply.js["choices"][0]

    @task(3)
    def neighbour(self):
        self.ask("word " * (1 + id(self) % 7 * 9), "none", 16)

    @task(1)
    def target(self):
        answer = self.ask("What does not change?", "invariant", 24)
        Reader.answer = Reader.answer or answer
        if answer and answer != Reader.answer:
            raise ValueError("a protected answer changed")
