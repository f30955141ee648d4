#!/bin/sh
# Makes the pictures of reports and of the watch from real runs: docs/picture.sh ATOLL FOLDER,
# or some of them with a third word: report, gallery or watch.
set -eu
atoll=$(realpath "$1")
out=$(realpath "$2")
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
folder=$(mktemp -d)
watch=""
trap 'kill $watch 2>/dev/null; rm -rf "$folder"' EXIT
cd "$folder"
shot() {
  timeout 120 "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --force-color-profile=srgb \
    "$@" 2>/dev/null
}
report() {
  "$atoll" run demo --quiet --out demo
  "$atoll" report demo -o report.html
  shot --window-size=1080,1240 --screenshot="$out/report.png" "file://$folder/report.html"
  # A browser's window is at least 500 wide, so a frame has the width of a phone.
  echo '<body style="margin:0"><iframe src="report.html" width="390" height="1500" style="border:0">' >phone.html
  shot --window-size=390,1500 --blink-settings=preferredColorScheme=0 \
    --screenshot="$out/report-phone.png" "file://$folder/phone.html"
}
# The first screen of the other three demos.
gallery() {
  for name in vertical text models; do
    "$atoll" run "demo-$name" --quiet --out "$name"
    "$atoll" report "$name" -o "$name.html"
    shot --window-size=1080,1240 --screenshot="$out/report-$name.png" "file://$folder/$name.html"
  done
}
# The watch: a long run is going on.
watched() {
  "$atoll" run fedavg --set split=classes --set stages=3 --set rounds=300 --set score_every=1 --quiet --out live/staged &
  run=$!
  "$atoll" watch live --port 8231 >watch.log &
  watch="$! $run"
  while [ "$(cat live/staged/times.jsonl 2>/dev/null | wc -l)" -lt 12 ] || ! grep -q watching watch.log; do sleep 1; done
  sleep 5
  shot --window-size=1080,820 --timeout=4000 --screenshot="$out/watch.png" http://127.0.0.1:8231/
}
case "${3:-all}" in
  report) report ;;
  gallery) gallery ;;
  watch) watched ;;
  all) report; gallery; watched ;;
esac
