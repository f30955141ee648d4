"""Sweeps on a cluster: blocks of points run as tasks of Ray on many machines or GPUs.

The driver is the process that runs the user's command. It splits the points of a sweep into blocks
and shows a table of them; a node runs a block and sends checkpoints and records. Only `ray.py`
imports Ray, and only if `--on` requests it. Sites and coordinators of a network never import this
package: Ray unpickles what it receives, so use it only on a trusted cluster.
"""
