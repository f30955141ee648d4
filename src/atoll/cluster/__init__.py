"""Sweeps on a cluster: blocks of points run as tasks of Ray on many machines or GPUs.

The driver is the process of the user's command. It deals the points of a sweep into blocks and
shows a table of them; a node runs a block and sends checkpoints and records. Only `ray.py` imports
Ray, and only where `--on` asks for it. No site and no coordinator of a network imports this
package: Ray's own serialisation unpickles, and is for the user's own cluster alone.
"""
