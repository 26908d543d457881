#!/usr/bin/env python3
"""llama.cpp on this machine, measured the way `blocklock bench` measures.

    bench_llama_cpp.py run   --model MODEL.gguf [--weights f16|bf16|as-is] [--sequences 1,8,16] ...
    bench_llama_cpp.py table FILE...

`run` prints one JSON document a line and cell. First tokens: from the first prompt token handed in until every
sequence has its first token. Decode step: median time of one step of all sequences. Tokens are chosen greedily by
argmax over the logits, whose time counts. F16 and BF16 weights come from llama.cpp's own requantise call and are kept
in the cache folder. `table` reads such lines, and documents of `blocklock bench --json`, and prints medians and
ratios. `scripts/bench.sh` installs what this needs and interleaves both engines.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time

VOCAB_FLOOR = 100  # ids below are special tokens in many vocabularies


def cache_folder():
    env = os.environ
    base = env.get("BLOCKLOCK_CACHE") or os.path.join(
        env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "blocklock")
    return os.path.join(base, "bench")


def requantise(lib, source, kind):
    """The model with weights in another format, made by llama.cpp where the cache lacks it."""
    stem = os.path.basename(source).removesuffix(".gguf").rsplit(".", 1)[0]
    target = os.path.join(cache_folder(), f"{stem}.{kind.upper()}.gguf")
    if not os.path.exists(target):
        os.makedirs(cache_folder(), exist_ok=True)
        params = lib.llama_model_quantize_default_params()
        params.ftype = {"f16": lib.LLAMA_FTYPE_MOSTLY_F16, "bf16": lib.LLAMA_FTYPE_MOSTLY_BF16}[kind]
        params.allow_requantize = True
        params.nthread = 2
        aside = f"{target}.{os.getpid()}"
        print(f"requantising {source} to {kind}", file=sys.stderr)
        if lib.llama_model_quantize(source.encode(), aside.encode(), ctypes.byref(params)) != 0:
            sys.exit(f"llama_model_quantize failed on {source}")
        os.replace(aside, target)
    return target


class Engine:
    """A model and a context for `sequences` sequences of `length` tokens."""

    def __init__(self, lib, path, sequences, length, prompt, threads):
        import numpy
        self.lib, self.numpy, self.sequences = lib, numpy, sequences
        self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * -(-length // 256) * 256
        params.n_batch = params.n_ubatch = max(prompt, sequences)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit("llama.cpp cannot make a context")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(max(prompt, sequences), 0, 1)

    def close(self):
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def decode(self, rows):
        """Runs (token, position, sequence, wants logits) rows; returns the best token of each row that wants one."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = logits
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        best = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = self.lib.llama_get_logits_ith(self.context, i)
                best.append(int(self.numpy.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
        return best


def run_once(engine, prompt, new, seed):
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_FLOOR, engine.vocab) for _ in range(prompt)] for _ in range(engine.sequences)]
    engine.clear()
    start = time.perf_counter()
    latest = []
    for sequence, ids in enumerate(prompts):
        last = len(ids) - 1
        latest += engine.decode([(token, i, sequence, i == last) for i, token in enumerate(ids)])
    first = time.perf_counter() - start
    steps = []
    for step in range(new - 1):
        before = time.perf_counter()
        latest = engine.decode([(token, prompt + step, s, True) for s, token in enumerate(latest)])
        steps.append(time.perf_counter() - before)
    return first, statistics.median(steps), time.perf_counter() - start


def run(args):
    from llama_cpp import llama_cpp as lib
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    path = args.model if args.weights == "as-is" else requantise(lib, args.model, args.weights)
    for sequences in args.sequences:
        engine = Engine(lib, path, sequences, args.prompt_tokens + args.max_tokens, args.prompt_tokens, args.threads)
        runs = [run_once(engine, args.prompt_tokens, args.max_tokens, seed) for seed in range(args.repeats)]
        engine.close()
        first, step, total = (statistics.median(values) for values in zip(*runs))
        print(json.dumps(dict(
            engine=f"llama.cpp {args.weights}", sequences=sequences, prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens, threads=args.threads, first_tokens_ms=first * 1e3,
            prefill_tokens_per_s=sequences * args.prompt_tokens / first, decode_step_ms=step * 1e3,
            decode_tokens_per_s=sequences / step, total_ms=total * 1e3,
            tokens_per_s=sequences * args.max_tokens / total,
        )), flush=True)


def documents(text):
    """JSON documents one after another."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        yield value


def table(args):
    cells = {}
    for name in args.files:
        with open(name) as file:
            for document in documents(file.read()):
                for cell in document.get("cells", [document]):
                    engine = cell.get("engine") or f"blocklock {cell['protection']}"
                    cells.setdefault((cell["sequences"], engine), []).append(cell)
    median = {key: {field: statistics.median(c[field] for c in runs)
                    for field in ("first_tokens_ms", "decode_step_ms", "total_ms", "tokens_per_s")}
              for key, runs in cells.items()}
    print(f"{'sequences':>9}  {'engine':<22} {'runs':>4} {'first tokens':>13} {'decode step':>12} {'in all':>11} "
          f"{'tok/s':>8}   faster than llama.cpp: first, step, in all")
    for (sequences, engine), m in sorted(median.items()):
        peers = [p for (n, e), p in median.items() if n == sequences and e.startswith("llama.cpp")]
        ratios = ""
        if peers and not engine.startswith("llama.cpp"):
            ratios = "  ".join(f"{min(p[f] for p in peers) / m[f]:5.2f}x"
                               for f in ("first_tokens_ms", "decode_step_ms", "total_ms"))
        print(f"{sequences:>9}  {engine:<22} {len(cells[(sequences, engine)]):>4} {m['first_tokens_ms']:>10.1f} ms "
              f"{m['decode_step_ms']:>9.2f} ms {m['total_ms']:>8.0f} ms {m['tokens_per_s']:>8.1f}   {ratios}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--model", required=True)
    one.add_argument("--weights", choices=["f16", "bf16", "as-is"], default="f16")
    one.add_argument("--sequences", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8, 16])
    one.add_argument("--prompt-tokens", type=int, default=512)
    one.add_argument("--max-tokens", type=int, default=64)
    one.add_argument("--repeats", type=int, default=1)
    one.add_argument("--threads", type=int, default=2)
    one.set_defaults(do=run)
    two = commands.add_parser("table")
    two.add_argument("files", nargs="+")
    two.set_defaults(do=table)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
