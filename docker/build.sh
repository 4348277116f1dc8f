#!/usr/bin/env bash
# Build the image from docker/versions.env.
#
#   docker/build.sh BASE_REPOSITORY [IMAGE]
#
# BASE_REPOSITORY: NVIDIA's PyTorch image without its tag, as your registry serves it.
# IMAGE: name of the result (default: megatron-dcp:latest). DOCKER: docker, podman, ... (default: docker)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${1:-} in -h | --help | "") sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

arguments=()
while IFS= read -r line; do
  case $line in '#'* | '') continue ;; NGC_PYTORCH=*) tag=${line#*=} ;; *) arguments+=(--build-arg "$line") ;; esac
done <"$here/versions.env"
exec "${DOCKER:-docker}" build "${arguments[@]}" --build-arg "BASE=$1:$tag" \
  --tag "${2:-megatron-dcp:latest}" --file "$here/../Dockerfile" "$here/.."
