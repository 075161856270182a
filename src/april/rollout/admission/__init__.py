"""Admission: how many groups are in flight (N').

A step trains on N groups. Before each step, the scheduler gets a `Plan` from an `Admission`. Its `target` is N'.
After the step, the admission observes the step. More groups in flight fill the engine better and make the training data
staler. Automatic admission chooses the freshest data whose throughput is close to the best.

Data flow of automatic admission:

1. `state.py`: the response lengths of each finished step update `LengthModel`.
2. `AutoAdmission.observe` passes the step to `RecentSteps` (running means) and its requests to `EngineRates` (costs).
3. If a plan is due, a thread builds `Conditions` from lengths, costs and means, and computes a `Forecast` of throughput
   and staleness for each N' of a ladder from N to N * (max_staleness + 1).
4. `Means` averages these forecasts with the forecasts of earlier plans, and `Choice` selects an N'.
5. The step after the next one follows the plan. Once N' has lasted for a few steps, `RecentSteps.compare` compares the
   measured throughput with the forecast. N' exceeds 2 N only after such a comparison confirmed it.

Reading order:

- `admission.py`: the protocol, and the largest N' that the staleness bound allows.
- `fixed.py`: a constant N'.
- `ramp.py`: N' that starts at N and increases to the target of another admission.
- `auto.py`: automatic admission: when to learn, when to plan, and what a plan contains.
- `recent_steps.py`: running means of the steps, and the comparison of measured with forecast throughput.
- `choice.py`: the ladder, the means over plans, and the choice of N'.
- `forecast.py`: a simulation of steps with a given N'.
- `slot_intervals.py`: which sample holds a slot of the engine when, with and without preemption.
- `lengths.py`: the distribution of response lengths, from finished and unfinished responses.
- `rates.py`: seconds for each unit of the engine's work, fitted to the requests of the steps.

Glossary:

- N, `batch_size`: groups that a step trains on. N', `target`: groups in flight.
- request: one stay of a sample in the engine within a step (`RequestInterval`); measured, in seconds.
- slot interval: a time in which a sample holds a slot; reckoned, in decode steps.
- decode step: all samples that decode gain one token. It is the clock of forecasts and of the fit of costs.
- above half: tokens of the samples that decode beyond half of the slots, which cost extra.
- worth: forecast throughput, reduced by a price for staleness.
- proven: the largest N' whose measured throughput confirmed its forecast.
- probe: one step with a few more groups than N, to learn the cost of resumed samples.
- budget: seconds that learning and planning may take, 1 % of the duration of the steps.
"""
