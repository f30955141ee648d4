#!/usr/bin/env bash
# Runs a command of this tree on a machine where the package is not installed.
export PYTHONPATH=src:.device/site ATOLL_DATA=.device/data PYTHONUNBUFFERED=1
exec "$@"
