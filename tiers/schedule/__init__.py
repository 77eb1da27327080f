"""When groups move: the trace of a step, the policy, and the executor that carries it out."""
