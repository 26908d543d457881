#!/usr/bin/env bash
# BlockLock and llama.cpp on one machine, in turns (A B A B …), so that what else the machine does hits both alike.
#
#   scripts/bench.sh [ROUNDS]            default 3 rounds; prints medians and ratios
#
# BENCH_MODEL       GGUF file to measure (default: the embedded model, fetched by `blocklock pull`)
# BENCH_WEIGHTS     llama.cpp's weights: f16 (default), bf16, as-is
# BENCH_SEQUENCES   default 1,8,16     BENCH_THREADS   default: all cores
# BENCH_VENV        Python environment with llama-cpp-python (default: .venv, made here when missing)
#
# llama.cpp is built with the instruction sets this machine has, one by one: its "native" build can pick ones that do
# not work on virtual machines.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-3}
weights=${BENCH_WEIGHTS:-f16}
sequences=${BENCH_SEQUENCES:-1,8,16}
threads=${BENCH_THREADS:-$(nproc)}
venv=${BENCH_VENV:-.venv}

if [ ! -x "$venv/bin/python" ]; then
    echo "making a Python environment in $venv" >&2
    python3 -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
    flags="-DGGML_NATIVE=OFF"
    for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 avx512_vbmi:AVX512_VBMI \
        avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
        if grep -qw "${pair%%:*}" /proc/cpuinfo; then flags="$flags -DGGML_${pair##*:}=ON"; fi
    done
    echo "building llama-cpp-python 0.3.36 with $flags (about ten minutes on 2 cores)" >&2
    "$venv/bin/pip" install -q numpy
    CMAKE_ARGS="$flags" "$venv/bin/pip" install -q --no-binary llama-cpp-python llama-cpp-python==0.3.36
fi

echo "building blocklock" >&2
cargo build --release --locked -q
blocklock=${CARGO_TARGET_DIR:-target}/release/blocklock
model=${BENCH_MODEL:-$("$blocklock" pull --json | "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["path"])')}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
peer() {
    "$venv/bin/python" scripts/bench_llama_cpp.py run --model "$model" --weights "$weights" --threads "$threads" "$@"
}
peer --sequences 1 --prompt-tokens 16 --max-tokens 4 >/dev/null # makes the weights before anything is timed
for round in $(seq "$rounds"); do
    # Each batch size in turn, so that both engines meet the same conditions.
    for n in ${sequences//,/ }; do
        echo "round $round of $rounds, $n at once" >&2
        "$blocklock" bench --model "$model" --sequences "$n" --threads "$threads" --repeats 1 --json >>"$out/blocklock"
        peer --sequences "$n" >>"$out/llama"
    done
done
echo "512 prompt tokens and 64 new ones a sequence, $threads threads, medians of $rounds rounds"
"$venv/bin/python" scripts/bench_llama_cpp.py table "$out/blocklock" "$out/llama"
