// Package checker tells whether a history is one of a linearizable log.
//
// It knows what a log promises, from its documentation, and nothing of how it is made.
package checker

import (
	"fmt"
	"slices"
	"time"

	"dlog/blackbox/history"

	"github.com/anishathalye/porcupine"
)

// Verdict says what was found of one history.
type Verdict struct {
	Why  string // it is wrong; empty: nothing is
	info *porcupine.LinearizationInfo
}

// Visualize writes an HTML page that shows how far the history can be explained.
func (verdict Verdict) Visualize(path string) error {
	if verdict.info == nil {
		return nil // it was rejected before
	}
	return porcupine.VisualizePath(logModel, *verdict.info, path)
}

// Check checks a history. One that takes longer than the time-out counts as wrong, for it is not
// shown to be right.
func Check(found *history.History, timeout time.Duration) Verdict {
	calls, err := prepare(found)
	if err != nil {
		return Verdict{Why: err.Error()}
	}
	operations := make([]porcupine.Operation, len(calls))
	var end int64
	for _, call := range calls {
		end = max(end, call.Return, call.Call)
	}
	for at, call := range calls {
		operations[at] = porcupine.Operation{
			ClientId: call.Client, Input: call, Call: call.Call, Return: call.Return,
		}
		if call.Outcome == history.Unknown {
			operations[at].Return = end + 1 // never
		}
	}
	result, info := porcupine.CheckOperationsVerbose(logModel, operations, timeout)
	switch result {
	case porcupine.Ok:
		return Verdict{}
	case porcupine.Illegal:
		return Verdict{"no order of the operations explains it", &info}
	}
	return Verdict{fmt.Sprintf("not decided within %v", timeout), &info}
}

// prepare finds where the records of each append are, from its answer and from all reads, and leaves
// out what shows nothing: refusals for other reasons than the log's state, and appends of unknown
// outcome whose records no read shows. The last read shows the whole log after everything else, so
// these are not in the log, or came after it.
func prepare(found *history.History) ([]called, error) {
	if err := checkEnd(found); err != nil {
		return nil, err
	}
	positions, err := findPositions(found)
	if err != nil {
		return nil, err
	}
	var calls []called
	for at := range found.Operations {
		call := called{Operation: &found.Operations[at]}
		if call.Kind == history.Read && call.Count != 0 && call.Count != int64(len(call.Rows)) {
			return nil, fmt.Errorf("a read of %d records showed %d", call.Count, len(call.Rows))
		}
		if call.start, err = parse(call.Start); err != nil {
			return nil, err
		}
		if call.end, err = parse(call.End); err != nil {
			return nil, err
		}
		switch {
		case call.Outcome == history.Refused && !isVerdict(call.Error):
			continue
		case call.Outcome == history.Unknown && call.Kind != history.Append &&
			call.Kind != history.Begin && call.Kind != history.Seal:
			continue
		case call.Kind == history.Append && call.Outcome != history.Refused:
			if call.positions, err = positionsOf(call, positions); err != nil {
				return nil, err
			}
			if call.positions == nil {
				continue
			}
		}
		calls = append(calls, call)
	}
	return calls, nil
}

func isVerdict(name string) bool {
	return slices.Contains(
		[]string{history.ConditionFailed, history.Fenced, history.Gap, history.Sealed}, name)
}

// checkEnd returns an error unless the history ends with a read of the whole log after all else.
func checkEnd(found *history.History) error {
	if len(found.Operations) == 0 {
		return fmt.Errorf("no operations")
	}
	last := found.Operations[len(found.Operations)-1]
	if last.Kind != history.Read || last.Start+last.End != "" || last.Outcome != history.Done {
		return fmt.Errorf("it does not end with a read of the whole log")
	}
	for _, each := range found.Operations[:len(found.Operations)-1] {
		if each.Call >= last.Call || (each.Outcome != history.Unknown && each.Return >= last.Call) {
			return fmt.Errorf("the last read began before another operation had ended")
		}
	}
	return nil
}

// findPositions returns where each value is; an error if one is at two places, or two are at one.
func findPositions(found *history.History) (map[string]history.Position, error) {
	positions := map[string]history.Position{}
	values := map[history.Position]string{}
	note := func(text, value string) error {
		position, err := history.ParsePosition(text)
		if err != nil {
			return err
		}
		if other, ok := positions[value]; ok && other != position {
			return fmt.Errorf("%s is at %v and at %v", value, other, position)
		}
		if other, ok := values[position]; ok && other != value {
			return fmt.Errorf("at %v are %s and %s", position, other, value)
		}
		positions[value], values[position] = position, value
		return nil
	}
	for _, each := range found.Operations {
		if each.Kind == history.Append && each.Outcome == history.Done && each.Last != "" {
			if err := note(each.Last, each.Values[len(each.Values)-1]); err != nil {
				return nil, err
			}
		}
		for _, row := range each.Rows {
			if err := note(row.Position, row.Value); err != nil {
				return nil, err
			}
		}
	}
	return positions, nil
}

// positionsOf returns where an append's records are, nil if it may have had no effect; an error if
// only some are there, or if those of a conditional append are not side by side in one entry.
func positionsOf(
	call called, positions map[string]history.Position,
) (found []history.Position, err error) {
	for _, value := range call.Values {
		if position, ok := positions[value]; ok {
			found = append(found, position)
		}
	}
	if len(found) == 0 && call.Outcome == history.Unknown {
		return nil, nil
	}
	if len(found) < len(call.Values) {
		return nil, fmt.Errorf("of %v, which were appended together, %d are there (%s)",
			call.Values, len(found), call.Outcome)
	}
	for at := 1; at < len(found); at++ {
		before := found[at-1]
		before[2]++
		if call.Conditional && found[at] != before {
			return nil, fmt.Errorf("%v are not side by side: %v", call.Values, found)
		}
	}
	return found, nil
}

func parse(text string) (*history.Position, error) {
	if text == "" {
		return nil, nil
	}
	position, err := history.ParsePosition(text)
	return &position, err
}
