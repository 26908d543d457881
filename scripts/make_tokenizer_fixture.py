#!/usr/bin/env python3
"""Expected token ids of SmolLM2's tokenizer, from the Python library `tokenizers`.

    python3 scripts/make_tokenizer_fixture.py MODEL.gguf crates/model/fixtures/smollm2_tokens.json

Needs `pip install gguf tokenizers`. The tokenizer is put together here from the GGUF metadata, independently of the
Rust code it checks. Each entry holds a text, its ids with special tokens read as such, and, where they differ, its ids
as plain text.
"""

import json
import sys

import tokenizers

TEXTS = [
    "", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "a", "A", "hello", " hello", "Hello, world!",
    "Once upon a time, there was a little", "The quick brown fox jumps over the lazy dog.",
    "don't can't I'll we've they're it's I'm he'd DON'T IT'S", "'s 't 're", "state-of-the-art e-mail",
    "0", "7", "42", "2024", "3.14159", "1,234,567.89", "10^9 + 7", "x1y2z3", "v1.0.0-rc.1", " 5 5", "½ ² ① Ⅷ ٣",
    "  leading spaces", "trailing spaces   ", "a  b   c    d", "tabs\tand\t\ttabs", "line one\nline two\n\nline four\n",
    "    indented\n        more\n", "\n  \n   x", "a\u00a0b\u2003c\u3000d", "zero\u200bwidth\u200djoiner\ufeffbom",
    "fn main() {\n    println!(\"{}\", 1 + 1);\n}\n", "def f(x):\n\treturn x**2  # square\n", "SELECT * FROM t WHERE a >= 10;",
    "<div class=\"a\">text &amp; more</div>", "https://example.com/a?b=c&d=%20#e", "user@example.org", "C:\\path\\to\\file",
    "{\"key\": [1, 2.5, null, true]}", "$100 €50 £20 ¥1000", "a+b=c; a-b!=c; a*b/c", "...", "!!!???", "———", "(){}[]<>",
    "naïve café résumé Ångström", "e\u0301 vs \u00e9", "Straße Größe", "Привет, мир!", "Καλημέρα κόσμε", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "こんにちは世界", "你好，世界！", "안녕하세요 세계",
    "🙂", "👩‍👩‍👧‍👦 family", "🇫🇷🇯🇵", "😀😃😄 ok", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "mixed 中文 and English 123 и русский",
    "\u0000\u0001\u001f\u007f", "\u0004\u0006\u0013dropped", "\ue000 private \U00100000", "\ufffd replacement",
    "supercalifragilisticexpialidocious antidisestablishmentarianism", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "=" * 80, " " * 70 + "x", "ALLCAPSWORD camelCaseWord snake_case_word", "H2O CO₂ E=mc²",
    "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|>b", "<|endoftext|>", "<|im_end", "<file_sep><filename>x.py",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]


def load(path):
    from gguf import GGUFReader

    meta = {k: f.contents() for k, f in GGUFReader(path).fields.items()}
    assert (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    spec = dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None, decoder=byte_level,
        added_tokens=[
            dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
            for i, t in enumerate(tokens) if kinds[i] == 3
        ],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), byte_level]),
        model=dict(
            type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
            fuse_unk=False, byte_fallback=False, ignore_merges=False,
            vocab={t: i for i, t in enumerate(tokens)}, merges=meta["tokenizer.ggml.merges"],
        ),
    )
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def main():
    special, plain = load(sys.argv[1]), load(sys.argv[1])
    plain.encode_special_tokens = True
    lines = []
    for text in TEXTS:
        entry = dict(text=text, ids=special.encode(text).ids)
        as_text = plain.encode(text).ids
        if as_text != entry["ids"]:
            entry["plain"] = as_text
        entry["decoded"] = special.decode(entry["ids"], skip_special_tokens=False)
        if entry["decoded"] == text:
            del entry["decoded"]
        lines.append(json.dumps(entry, ensure_ascii=True))
    with open(sys.argv[2], "w") as out:
        out.write("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"wrote {len(lines)} texts to {sys.argv[2]} (tokenizers {tokenizers.__version__})")


if __name__ == "__main__":
    main()
