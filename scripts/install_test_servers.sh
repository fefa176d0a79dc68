#!/usr/bin/env bash
# Stores that the tests run against, where this machine lets them be installed: Ceph's gateway from the
# distribution, Azurite from npm; fuse3, for a file system that misbehaves; libsodium and curl, which the
# tensorizer library calls; a browser for the page of a start, and Prometheus for the metrics. Without them
# their tests are skipped, and say so.
set -eu
have() { command -v "$1" > /dev/null; }

policy=/usr/sbin/policy-rc.d
if have apt-get && [ "$(id -u)" = 0 ] && [ ! -e "$policy" ]; then # nothing is to start by itself
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
if ! have radosgw && have apt-get && [ "$(id -u)" = 0 ]; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends radosgw ceph-common ceph-mon ceph-osd; } > /dev/null \
    || echo "radosgw cannot be installed: its tests are skipped" >&2
fi
if ! have azurite-blob && have npm; then
  npm install --global --silent azurite > /dev/null || echo "azurite cannot be installed: its tests are skipped" >&2
fi
if ! have fusermount3 && have apt-get && [ "$(id -u)" = 0 ]; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends fuse3; } > /dev/null \
    || echo "fuse3 cannot be installed: its tests are skipped" >&2
fi
if ! { ls /usr/lib/*/libsodium.so* > /dev/null 2>&1 && have curl; } && have apt-get && [ "$(id -u)" = 0 ]; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends libsodium23 curl; } > /dev/null \
    || echo "libsodium and curl cannot be installed: tests of encrypted files fail" >&2
fi
if ! { have chromium && have chromedriver; } && have apt-get && [ "$(id -u)" = 0 ]; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver; } > /dev/null \
    || echo "chromium cannot be installed: tests in a browser are skipped" >&2
fi
if ! have prometheus && have apt-get && [ "$(id -u)" = 0 ]; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends prometheus; } > /dev/null \
    || echo "prometheus cannot be installed: its tests are skipped" >&2
fi
