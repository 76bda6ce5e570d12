"""The operations among the ranks of a group, one file per kind.

Each public function takes its arguments as torch's does, finds the group's communicator and calls
it. Nothing is checked twice: tensors, dtypes, sizes and reduce-ops are checked by the native call.
"""
