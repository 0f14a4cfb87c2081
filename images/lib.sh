# shellcheck shell=bash
# What images/build, images/fixture and images/check share. Sourced, never run.
#
# Images are written here as a `dir:` image (a manifest, a config, the layers) and handed to `podman pull`. Unlike
# `podman import` that gives several layers, the same image id for the same content, and a base layer that a store
# which has it already does not read again.

# Modes of what is packed must not depend on who packs it.
umask 022

program=images/${0##*/}
say() { printf '%s: %s\n' "$program" "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Arguments for every podman call: those of --into "…", then what this host needs and they leave open.
podman_args=()

into() {
  read -r -a podman_args <<<"$1"
}

# Called once, after the options. crun refuses the hybrid layout of cgroups, so there it must be runc; and without systemd
# (or a session of it, for an ordinary user) Podman must manage cgroups by itself.
suit_host() {
  if [[ $(stat -fc %T /sys/fs/cgroup 2>/dev/null) != cgroup2fs && " ${podman_args[*]} " != *" --runtime"* ]]; then
    PATH=$PATH:/usr/sbin command -v runc >/dev/null || die "this host mounts version 1 of cgroups, for which runc is needed. Remedy: scripts/setup"
    podman_args+=(--runtime runc)
  fi
  if [[ " ${podman_args[*]} " != *" --cgroup-manager"* ]] &&
    [[ ! -d /run/systemd/system || ($EUID -ne 0 && ! -S ${XDG_RUNTIME_DIR:-/nonexistent}/systemd/private) ]]; then
    podman_args+=(--cgroup-manager cgroupfs)
  fi
}

podman_() { podman "${podman_args[@]}" "$@"; }

require() {
  local missing=() tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  ((${#missing[@]} == 0)) || die "missing: ${missing[*]}. Remedy: scripts/setup"
}

cache_dir() {
  if [[ ${CYNODE_CACHE_DIR:-} ]]; then
    echo "$CYNODE_CACHE_DIR"
  elif [[ ${XDG_CACHE_HOME:-} ]]; then
    echo "$XDG_CACHE_HOME/cynode"
  elif ((EUID == 0)); then
    echo /var/cache/cynode
  else
    echo "$HOME/.cache/cynode"
  fi
}

sha256() { sha256sum "$@" | cut -d' ' -f1; }

# put_layer DIR TAR [SHA256]: links or copies a layer into the image directory and prints its digest.
put_layer() {
  local directory=$1 tar=$2 digest=${3:-}
  [[ $digest ]] || digest=$(sha256 "$tar")
  ln -s "$(realpath "$tar")" "$directory/$digest"
  echo "$digest"
}

# write_image DIR CONFIG_JSON oci|docker LAYER_DIGEST…: config and manifest over layers already put in DIR.
# CONFIG_JSON is the image's `config` object. Only Docker's format knows a health check.
write_image() {
  local directory=$1 config=$2 format=$3 architecture layers='[]' digest
  shift 3
  case "$(uname -m)" in
    x86_64) architecture=amd64 ;;
    aarch64) architecture=arm64 ;;
    *) architecture=$(uname -m) ;;
  esac
  for digest in "$@"; do
    layers=$(jq -c --arg d "$digest" --argjson s "$(stat -Lc %s "$directory/$digest")" '. + [{digest: ("sha256:" + $d), size: $s}]' <<<"$layers")
  done

  jq -cSn --argjson config "$config" --argjson layers "$layers" --arg architecture "$architecture" '{
    created: "2026-01-01T00:00:00Z", architecture: $architecture, os: "linux", config: $config,
    rootfs: {type: "layers", diff_ids: [$layers[].digest]},
    history: [$layers[] | {created: "2026-01-01T00:00:00Z", created_by: "cynode images"}]
  }' >"$directory/config.json"
  digest=$(sha256 "$directory/config.json")
  mv "$directory/config.json" "$directory/$digest"

  jq -cSn --argjson layers "$layers" --arg digest "sha256:$digest" --argjson size "$(stat -c %s "$directory/$digest")" --arg format "$format" '
    {oci: {manifest: "application/vnd.oci.image.manifest.v1+json", config: "application/vnd.oci.image.config.v1+json", layer: "application/vnd.oci.image.layer.v1.tar"},
     docker: {manifest: "application/vnd.docker.distribution.manifest.v2+json", config: "application/vnd.docker.container.image.v1+json", layer: "application/vnd.docker.image.rootfs.diff.tar"}
    }[$format] as $type | {
      schemaVersion: 2, mediaType: $type.manifest,
      config: {mediaType: $type.config, digest: $digest, size: $size},
      layers: [$layers[] | {mediaType: $type.layer} + .]
    }' >"$directory/manifest.json"
  printf 'Directory Transport Version: 1.1\n' >"$directory/version"
}

# load_image DIR NAME…: into the store, under every name; prints the image id. Some versions of Podman name what they
# pull from a directory after its path: that name goes.
load_image() {
  local directory=$1 name id
  shift
  id=$(podman_ pull --quiet "dir:$directory") || die "podman could not load the image; its message is above"
  for name in "$@"; do podman_ tag "$id" "$name"; done
  while read -r name; do
    case $name in *"$directory"*) podman_ untag "$id" "$name" ;; esac
  done < <(podman_ image inspect --format '{{range .RepoTags}}{{println .}}{{end}}' "$id")
  echo "$id"
}

# label IMAGE KEY: the label's value, or nothing when image or label are absent.
label() { podman_ image inspect --format "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null || true; }
