"""Names of replicas: ``group/process.number``. The group is left out where a fleet has only one kind, the number where
a process hosts only one replica."""


def replica_name(group: str, process_id: str, number: int, count: int) -> str:
    """The name of replica ``number`` of the ``count`` that a process hosts; ``process_id`` is Serve's."""
    own = f"{process_id}.{number}" if count > 1 else process_id
    return f"{group}/{own}" if group else own


def group_of(replica: str) -> str:
    """The group that a replica belongs to; empty where there is only one kind."""
    return replica.rpartition("/")[0]


def process_of(replica: str) -> str:
    """Serve's id of the process that hosts a replica."""
    return replica.rpartition("/")[2].partition(".")[0]
