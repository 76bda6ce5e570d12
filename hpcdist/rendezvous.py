"""The names of ``torch.distributed.rendezvous``."""

from hpcdist.startup.rendezvous import register_rendezvous_handler, rendezvous

__all__ = ["register_rendezvous_handler", "rendezvous"]
