"""The systems of the experiment on programs: ours, what it is without its parts, and those of others."""

from dataclasses import dataclass

from controller.programs.options import ProgramOptions

AFFINITY = 4.0  # requests that a whole prompt in a prefix cache outweighs, for systems that place by load
OURS, VLLM = "programs", "vllm-affinity"
SHIPPED = ProgramOptions()


@dataclass(frozen=True)
class Rival:
    """A system: engines under a batch policy, behind the controller's ``Fleet`` with these options."""

    policy: str
    routing: str
    admits: bool = False
    programs: ProgramOptions = SHIPPED
    knows_programs: bool = True
    affinity: float = AFFINITY
    budget: int = 2048


UNBOUNDED = ProgramOptions(bounded=False)
WHOLE = ProgramOptions(stages="whole", bounded=False)
SHARED = ProgramOptions(stages="accumulated", bounded=False)  # how both papers split a program's deadline
SYSTEMS = {
    OURS: Rival("slo", "marginal_load", True, affinity=1.0, budget=8192),
    "no-bound": Rival("slo", "marginal_load", True, UNBOUNDED, affinity=1.0, budget=8192),
    "accumulated-share": Rival(
        "slo", "marginal_load", True, ProgramOptions(stages="accumulated"), affinity=1.0, budget=8192
    ),
    "no-graphs": Rival("slo", "marginal_load", True, ProgramOptions(stages="whole"), affinity=1.0, budget=8192),
    "asks-once": Rival("slo", "marginal_load", True, ProgramOptions(asks_again=False), affinity=1.0, budget=8192),
    "no-places": Rival("slo", "marginal_load", True, ProgramOptions(has_places=False), affinity=1.0, budget=8192),
    "no-precedence": Rival(
        "slo", "marginal_load", True, ProgramOptions(keeps_promises=False), affinity=1.0, budget=8192
    ),
    VLLM: Rival("vllm", "least_loaded", knows_programs=False),
    "lmetric": Rival("vllm", "lmetric", knows_programs=False, affinity=1.0),  # its score counts what is cached
    "plas": Rival("plas", "least_loaded", knows_programs=False),
    "edf": Rival("edf", "least_loaded", programs=WHOLE),
    "tempo": Rival("tempo", "least_loaded", programs=SHARED),
    "concord": Rival("calm", "least_loaded", programs=SHARED),
}
ABLATIONS = ("no-bound", "accumulated-share", "no-graphs", "asks-once", "no-places", "no-precedence")
