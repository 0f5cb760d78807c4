"""A discrete-event simulator of a run: the policy that drives the live controller, with modelled engines, trainers and agents."""
