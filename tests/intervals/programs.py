"""Runs a program on facts: what holds for its operands gives what holds for its results.

Calls are put into their callers first. Most equations are then one rule of `rules`, each on its
own. A choice between two values is made under its condition (`scopes`), a product or a sum may know
more than its factors do (`relations`), a branch is run as a choice, and a loop until its carry
stands still (`fixed_points`).
"""

import functools

import numpy as np

from ampx.jaxprs import building, reading
from intervals import (
    array_rules,  # noqa: F401 (it enters its rules)
    fixed_points,
    relations,
    rules,
    scopes,
)
from intervals.scopes import OPPOSITE, Impossible, Scope
from intervals.values import INF, is_integer, join, meet, of_array, of_literal, unknown

LONGEST = 16  # iterations of a loop that are run one by one


class Program:
    """A jaxpr without calls, and which equation makes which variable."""

    def __init__(self, jaxpr):
        jaxpr = building.inline_calls(jaxpr)
        self.body = reading.open_jaxpr(jaxpr)
        self.constants = dict(zip(self.body.constvars, reading.constants_of(jaxpr), strict=True))
        self._maker = {out: eqn for eqn in self.body.eqns for out in eqn.outvars}
        self._find_ancestors()
        atoms = [*self.body.outvars, *(x for eqn in self.body.eqns for x in eqn.invars)]
        self.literals = {id(x): of_literal(x) for x in atoms if reading.is_literal(x)}

    def _find_ancestors(self):
        """What each variable is made of, as sets in the bits of an integer."""
        given = [*self.body.constvars, *self.body.invars]
        variables = [*given, *(out for eqn in self.body.eqns for out in eqn.outvars)]
        self.bit = {variable: 1 << number for number, variable in enumerate(variables)}
        self.made_of = dict.fromkeys(given, 0)
        self.made_elementwise_of = dict.fromkeys(given, 0)
        for eqn in self.body.eqns:
            operands = [atom for atom in eqn.invars if not reading.is_literal(atom)]
            every, local = 0, 0
            for atom in operands:
                every |= self.made_of[atom] | self.bit[atom]
                local |= self.made_elementwise_of[atom] | self.bit[atom]
            for out in eqn.outvars:
                self.made_of[out] = every
                self.made_elementwise_of[out] = local if scopes.is_elementwise(eqn) else 0

    def maker(self, atom):
        """The equation that makes a value, if one does."""
        return None if reading.is_literal(atom) else self._maker.get(atom)

    def apply(self, scope, eqn):
        """The facts of an equation's results, in a scope of this program."""
        return _apply(scope, eqn)

    def run(self, facts):
        """A scope that knows every variable."""
        given = dict(zip(self.body.invars, facts, strict=True))
        given |= {var: of_array(array) for var, array in self.constants.items()}
        scope = Scope(self, given)
        for eqn in self.body.eqns:
            scope.compute(eqn)
        return scope

    def results(self, facts):
        """The facts of the results."""
        scope = self.run(facts)
        return [scope.read(atom) for atom in self.body.outvars]

    def by_cases(self, scope):
        """The facts of the results, found apart for each answer to questions about counts.

        Some optimizers ask several times whether this is the first step. To join what follows from
        each answer would allow for a step that is the first one and is not.
        """
        cases = [scope]
        for eqn in self.body.eqns:
            if _is_about_counts(eqn) and len(cases) < 8:
                cases = [case for outer in cases for case in _cases(outer, eqn.outvars[0])]
        results = [[case.read(atom) for atom in self.body.outvars] for case in cases]
        return [functools.reduce(join, facts) for facts in zip(*results, strict=True)]


def _is_about_counts(eqn):
    return eqn.primitive.name in OPPOSITE and all(
        is_integer(atom.aval.dtype) and atom.aval.size == 1 for atom in eqn.invars
    )


def _cases(scope, condition):
    for holds in (0.0, 1.0):
        try:
            yield scope.assume(condition, holds)
        except Impossible:
            continue


_programs = {}


def program_of(jaxpr):
    """The program of an inner jaxpr, made once."""
    if id(jaxpr) not in _programs:
        _programs[id(jaxpr)] = (jaxpr, Program(jaxpr))  # a jaxpr that is kept keeps its id
    return _programs[id(jaxpr)][1]


def _apply(scope, eqn):
    name = eqn.primitive.name
    if name == "cond":
        return _cond(scope, eqn)
    facts = scope.operands(eqn)
    if name == "scan":
        return _scan(eqn, facts)
    if name == "while":
        return _while(eqn, facts)
    body = reading.called_body(eqn)
    if body is not None:  # a custom rule; other calls were put in place
        return program_of(body).results(facts)
    if name == "optimization_barrier":
        return facts
    if name == "select_n":
        return [_select(scope, eqn)]
    if len(eqn.outvars) > 1:
        if name == "unstack":
            return list(facts[0].parts or facts * len(eqn.outvars))
        return [unknown(out.aval.dtype) for out in eqn.outvars]
    fact = rules.apply(eqn, facts)
    # Each factor must be finite by itself: 0 * inf is a NaN, whatever belongs together.
    if name in ("mul", "div") and not fact.is_finite and all(f.is_finite for f in facts):
        fact = relations.related(scope, eqn, fact)
    if name == "mul" and relations.have_one_sign(scope, *eqn.invars):
        fact = fact._replace(lo=max(fact.lo, 0.0))
    if name == "add" and (between := relations.mixed(scope, eqn)):
        fact = meet(fact, between)
    return [fact]


def _select(scope, eqn):
    condition, *cases = eqn.invars
    found = None
    for k, case in enumerate(cases):
        chosen = scope.read(condition)
        if not chosen.lo <= k <= chosen.hi:
            continue
        try:
            inside = scope.assume(condition, float(k)) if len(cases) == 2 else scope
        except Impossible:
            continue
        fact = inside.read(case)
        if case.aval.size != eqn.outvars[0].aval.size:
            fact = fact._replace(l1=INF, l2=INF)
        found = fact if found is None else _united(found, fact, condition)
    return unknown(eqn.outvars[0].aval.dtype) if found is None else found


def _united(a, b, condition):
    both = join(a, b)
    if condition.aval.size == 1:
        return both
    return both._replace(l1=a.l1 + b.l1, l2=a.l2 + b.l2)  # some numbers of one, some of the other


def _cond(scope, eqn):
    index, *others = eqn.invars
    branches, found = reading.bodies_of(eqn), None
    for k, branch in enumerate(branches):
        inside = scope
        try:
            if len(branches) == 2 and (condition := _source(scope, index)) is not None:
                inside = scope.assume(condition, float(k))
        except Impossible:
            continue
        results = program_of(branch).results([inside.read(x) for x in others])
        found = results if found is None else list(map(join, found, results))
    return found or [unknown(out.aval.dtype) for out in eqn.outvars]


def _source(scope, atom):
    """The condition that was converted to the number of a branch, if that is where it is from."""
    eqn = scope.program.maker(atom)
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        if eqn.invars[0].aval.dtype == np.bool_:
            return eqn.invars[0]
    return None


def _scan(eqn, facts):
    (body,) = reading.bodies_of(eqn)
    consts, carry, inputs = reading.split_scan(eqn, facts)
    inputs = [fact._replace(parts=None) for fact in inputs]
    program, count = program_of(body), len(carry)
    outs = program.body.outvars

    def step(carry):
        return program.results([*consts, *carry, *inputs])

    length, _ = reading.scan_steps(eqn)
    stacked = [None] * (len(outs) - count)
    is_short = length <= LONGEST
    if not is_short:
        carry = fixed_points.find(lambda c: step(c)[:count], carry, [x.aval for x in outs[:count]])
    for _ in range(length if is_short else 1):
        results = step(carry)
        carry = results[:count] if is_short else carry
        pairs = zip(stacked, results[count:], strict=True)
        stacked = [new if old is None else join(old, new) for old, new in pairs]
    stacked = [
        unknown(out.aval.dtype) if fact is None else fact
        for fact, out in zip(stacked, eqn.outvars[count:], strict=True)
    ]
    return [*carry, *(fact._replace(l1=INF, l2=INF, parts=None) for fact in stacked)]


def _while(eqn, facts):
    _, consts, carry = reading.split_while(eqn, facts)
    program = program_of(reading.bodies_of(eqn)[1])
    avals = [x.aval for x in program.body.outvars]
    return fixed_points.find(lambda c: program.results([*consts, *c]), carry, avals)
