#!/bin/sh
# Compiles every variant measured in README.md. usage: build.sh OUTDIR   (NVCC: the compiler, 13.0 or later)
set -e; cd "$(dirname "$0")"; out=$1; mkdir -p "$out"; : > "$out/ptxas.log"
cc() { src=$1; name=$2; shift 2; echo "== $name" >> "$out/ptxas.log"; ${NVCC:-nvcc} $NVCCFLAGS -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 -fmad=false -Xptxas -v -cubin "$@" -o "$out/$name.cubin" "$src" 2>> "$out/ptxas.log"; }
python3 gen_wgmma.py
var() { kind=$1; src=$2; tag=$3; flags=$(echo "$tag" | sed 's/\([A-Z][A-Z]\)\([0-9]*\)_*/-D\1=\2 /g'); cc "$src" "${kind}_$tag" $flags; }
[ -n "$ONLY" ] || { cc probe.cu probe; cc attn_ref.cu ref; cc chain_ref.cu chain_ref; }
for t in $PREFILL; do var p attn_prefill.cu "$t"; done
for t in $DECODE; do var d attn_decode.cu "$t"; done
for t in $FEW; do var f attn_few.cu "$t"; done
for t in $CMMA; do var cm chain_mma.cu "$t"; done
for t in $CWG; do var cw chain_wg.cu "$t"; done
