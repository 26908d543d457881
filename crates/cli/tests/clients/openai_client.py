"""The official openai package against a running server: openai_client.py ADDRESS. Any surprise is an exception."""

import json
import sys

import openai

address = sys.argv[1]
client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="right", max_retries=0, timeout=120)
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
checks = 0


def check(holds, what):
    global checks
    assert holds, what
    checks += 1


def refused(kind, status, param, call):
    try:
        call()
    except kind as e:
        check(e.status_code == status, e)
        check(e.body["param"] == param and e.body["message"], e.body)
        return
    raise AssertionError(f"not refused: {param}")


# Models.
(model,) = client.models.list().data
check(client.models.retrieve(model.id).id == model.id, "a model by name")
refused(openai.NotFoundError, 404, None, lambda: client.models.retrieve("another"))


# A chat, whole and streamed, gives one answer; its log probabilities add up.
def ask(**more):
    return client.chat.completions.create(model=model.id, messages=messages, seed=7, max_tokens=24, logprobs=True,
                                          top_logprobs=20, extra_body={"logit_bits": True, "return_token_ids": True,
                                                                       "ignore_eos": True}, **more)


whole = ask()
choice = whole.choices[0]
check(choice.finish_reason == "length" and whole.usage.completion_tokens == 24, whole.usage)
check(whole.model_extra["reproducibility"]["promised"] is True, whole)
check(whole.model_extra["seed"] == 7 and whole.system_fingerprint, whole)
tokens = choice.logprobs.content
check(len(tokens) == 24 and all(len(t.top_logprobs) == 20 for t in tokens), "Top-20 of every token")
for token in tokens:
    check(token.logprob <= 0 and token.top_logprobs[0].logprob >= token.logprob, token)
    check(token.top_logprobs[0].model_extra["logit_bits"].startswith("0x"), token)
check(bytes(b for t in tokens for b in t.bytes).decode(errors="replace") == choice.message.content, "bytes spell the answer")

text, streamed, usage, finish = "", [], None, None
for chunk in ask(stream=True, stream_options={"include_usage": True}):
    usage = chunk.usage or usage
    for part in chunk.choices:
        text += part.delta.content or ""
        finish = part.finish_reason or finish
        streamed += part.logprobs.content if part.logprobs else []
check(text == choice.message.content and finish == "length", text)
check(streamed == tokens, "the same log probabilities, streamed")
check(usage.completion_tokens == 24, usage)

# Protections by a field of the request.
for protection in ["none", "invariant"]:
    answer = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=4,
                                            extra_body={"protection": protection})
    check(answer.model_extra["reproducibility"]["protection"] == protection, answer)
    check(answer.model_extra["reproducibility"]["promised"] is (protection == "invariant"), answer)

# Several choices differ, and each is the same again.
many = [ask(n=3) for _ in range(2)]
texts = [[c.message.content for c in answer.choices] for answer in many]
check(texts[0] == texts[1] and len(set(texts[0])) == 3, texts)

# Completions: stop strings, echo with the prompt's log probabilities, several prompts' worth of streaming.
plain = client.completions.create(model=model.id, prompt="Once upon", max_tokens=12, temperature=0, logprobs=5, echo=True)
check(plain.choices[0].text.startswith("Once upon"), plain)
check(plain.choices[0].logprobs.token_logprobs[0] is None and len(plain.choices[0].logprobs.tokens) > 12, plain)
answer = client.completions.create(model=model.id, prompt="Once upon", max_tokens=12, temperature=0).choices[0].text
stop = answer[5:8]
cut = client.completions.create(model=model.id, prompt="Once upon", max_tokens=12, temperature=0, stop=[stop]).choices[0]
check(cut.finish_reason == "stop" and cut.text == answer[: answer.index(stop)], cut)
parts = client.completions.create(model=model.id, prompt="Once upon", max_tokens=12, temperature=0, stream=True)
check("".join(p.choices[0].text for p in parts if p.choices) == answer, "streamed")

# Errors are the package's own classes, and say what and where.
bad = openai.BadRequestError
refused(bad, 400, "temperature", lambda: client.chat.completions.create(model=model.id, messages=messages, temperature=-1))
refused(bad, 400, "top_logprobs", lambda: client.chat.completions.create(model=model.id, messages=messages, top_logprobs=3))
refused(bad, 400, "messages", lambda: client.chat.completions.create(model=model.id, messages=[]))
refused(bad, 400, "protection",
        lambda: client.chat.completions.create(model=model.id, messages=messages, extra_body={"protection": "most"}))
refused(bad, 400, "prompt", lambda: client.completions.create(model=model.id, prompt=[1] * 100_000))
refused(openai.NotFoundError, 404, None, lambda: client.chat.completions.create(model="another", messages=messages))
refused(openai.NotFoundError, 404, None, lambda: client.embeddings.create(model=model.id, input="x"))
refused(openai.NotFoundError, 404, None, lambda: client.responses.create(model=model.id, input="x"))
wrong = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
refused(openai.AuthenticationError, 401, None, wrong.models.list)

# A client that gives up, and the server goes on.
hurried = client.with_options(timeout=0.05)
try:
    hurried.completions.create(model=model.id, prompt="x", max_tokens=4000, extra_body={"ignore_eos": True})
    raise AssertionError("4000 tokens within 50 ms")
except openai.APITimeoutError:
    checks += 1
check(ask().choices[0].message.content == choice.message.content, "the same answer as before")

print(json.dumps({"checks": checks, "package": openai.__version__}))
