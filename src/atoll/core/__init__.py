"""What every layer stands on: errors, random streams, options, messages, the contract, records."""

VERSION = "0.2.0"
