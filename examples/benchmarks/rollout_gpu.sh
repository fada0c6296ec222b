#!/bin/bash
# Where vLLM was unpacked into $SITE and qerl-trl is not installed: make its entry point known, then run the given command.
set -e
repo=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$SITE/qerl_trl-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: qerl-trl\nVersion: 0.1.0\n' > "$SITE/qerl_trl-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nqerl_nvfp4 = qerl_trl.rollout.vllm.plugin:register\n' > "$SITE/qerl_trl-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$SITE:$repo/src:$repo/kernels/torch-ext${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0
exec "$@"
