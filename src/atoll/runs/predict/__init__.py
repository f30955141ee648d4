"""Predictions and exports with what a run left behind, one module for each kind of data."""
