#!/bin/sh
# Makes the picture of the report that the README shows: docs/picture.sh ATOLL FILE.png
set -eu
atoll=$(realpath "$1")
out=$(realpath "$2")
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$atoll" run demo --seeds 0..2 --quiet --out demo
"$atoll" run alone --set split=columns --set clients=4 --set ratio=0.4 --set 'widths=[64, 32]' \
  --set rounds=12 --seeds 0..2 --quiet --out alone
"$atoll" report demo alone -o report.html
"$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --force-color-profile=srgb \
  --window-size=1080,1240 --screenshot="$out" "file://$folder/report.html"
