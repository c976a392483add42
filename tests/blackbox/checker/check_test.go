package checker

import (
	"os"
	"strings"
	"testing"
	"time"

	"dlog/blackbox/history"
)

// at returns a history in which each operation begins when the one before has ended, and which ends
// with a read of these values, the first at 1:0:0, the second at 1:1:0, and so on.
func at(values string, operations ...history.Operation) *history.History {
	clock := int64(0)
	for number := range operations {
		operations[number].Call, operations[number].Return = clock, clock+1
		if operations[number].Outcome == "" {
			operations[number].Outcome = history.Done
		}
		clock += 2
	}
	final := history.Operation{
		Kind: history.Read, Call: clock, Return: clock + 1, Outcome: history.Done, Rows: rows(values)}
	return &history.History{Operations: append(operations, final)}
}

func rows(values string) (found []history.Row) {
	for number, value := range strings.Fields(values) {
		position := history.Position{1, int64(number), 0}
		found = append(found, history.Row{
			Position: position.String(), Number: int64(number), Value: value})
	}
	return found
}

// downwards returns a history in which everybody agrees that the record that came later lies before.
func downwards() *history.History {
	made := at("b a", wrote("a", "1:1:0"), wrote("b", "1:0:0"))
	shown := made.Operations[2].Rows
	shown[0], shown[1] = shown[1], shown[0]
	shown[0].Number, shown[1].Number = 0, 1
	return made
}

func wrote(value, last string) history.Operation {
	return history.Operation{Kind: history.Append, Values: []string{value}, Last: last}
}

func read(values string) history.Operation {
	return history.Operation{Kind: history.Read, Rows: rows(values)}
}

func unknown(operation history.Operation) history.Operation {
	operation.Outcome = history.Unknown
	return operation
}

func refused(operation history.Operation, name string) history.Operation {
	operation.Outcome, operation.Error, operation.Last = history.Refused, name, ""
	return operation
}

func given(operation history.Operation, expected string) history.Operation {
	operation.Conditional, operation.Expected = true, expected
	return operation
}

func claimed(epoch, base int64) *history.Claim {
	return &history.Claim{Producer: "p", Epoch: epoch, Base: base, Token: "t"}
}

func begun(claim *history.Claim) history.Operation {
	return history.Operation{Kind: history.Begin, Claim: claim, Sequence: claim.Base - 1}
}

func as(claim *history.Claim, sequence int64, operation history.Operation) history.Operation {
	operation.Claim, operation.Sequence = claim, sequence
	return operation
}

func TestWhatALogMayDo(t *testing.T) {
	one, two := claimed(1, 0), claimed(2, 1)
	for name, right := range map[string]*history.History{
		"nothing":                                at(""),
		"an append is read":                      at("a", wrote("a", "1:0:0"), read("a")),
		"an unknown append is read":              at("a", unknown(wrote("a", "")), read("a")),
		"it is read later":                       at("a", unknown(wrote("a", "")), read("")),
		"it never comes":                         at("", unknown(wrote("a", "")), read("")),
		"its position is not known":              at("a", wrote("a", ""), read("a")),
		"a condition holds":                      at("a b", wrote("a", "1:0:0"), given(wrote("b", "1:1:0"), "1:0:0")),
		"an incarnation is fenced":               at("a b", begun(one), as(one, 0, wrote("a", "1:0:0")), begun(two), as(two, 1, wrote("b", "1:1:0")), refused(as(one, 1, wrote("c", "")), history.Fenced)),
		"it writes until the later one has":      at("a b", begun(one), as(one, 0, wrote("a", "1:0:0")), begun(two), as(one, 1, wrote("b", "1:1:0")), refused(as(two, 1, wrote("c", "")), history.Fenced)),
		"an incarnation begins that no one sees": at("", begun(one), unknown(begun(&history.Claim{Producer: "p"})), refused(as(one, 0, wrote("a", "")), history.Fenced)),
		"a sealed log":                           at("a", wrote("a", "1:0:0"), history.Operation{Kind: history.Seal}, refused(wrote("b", ""), history.Sealed)),
		"a refusal that says nothing":            at("", refused(wrote("a", ""), "Unavailable")),
	} {
		if verdict := Check(right, time.Minute); verdict.Why != "" {
			t.Errorf("%s: %s", name, verdict.Why)
		}
	}
}

func TestWhatNoLogMayDo(t *testing.T) {
	one, two := claimed(1, 0), claimed(2, 1)
	for name, wrong := range map[string]*history.History{
		"an append is not read":            at("a", wrote("a", "1:0:0"), read("")),
		"an unknown append goes again":     at("a", unknown(wrote("a", "")), read("a"), read("")),
		"it is there, and the tail not":    at("a", unknown(wrote("a", "")), read("a"), history.Operation{Kind: history.Tail}),
		"a condition does not hold":        at("a b", wrote("a", "1:0:0"), given(wrote("b", "1:1:0"), "")),
		"it holds and is refused":          at("a", wrote("a", "1:0:0"), refused(given(wrote("b", ""), "1:0:0"), history.ConditionFailed)),
		"a fenced incarnation writes":      at("a b c", begun(one), as(one, 0, wrote("a", "1:0:0")), begun(two), as(two, 1, wrote("b", "1:1:0")), as(one, 2, wrote("c", "1:2:0"))),
		"the only incarnation is fenced":   at("", begun(one), refused(as(one, 0, wrote("a", "")), history.Fenced)),
		"a number is missing":              at("a", begun(one), as(one, 1, wrote("a", "1:0:0"))),
		"a number that fits is refused":    at("", begun(one), refused(as(one, 0, wrote("a", "")), history.Gap)),
		"a sealed log is written":          at("a", history.Operation{Kind: history.Seal}, wrote("a", "1:0:0")),
		"a log that is not sealed refuses": at("", refused(wrote("a", ""), history.Sealed)),
		"half of a conditional append":     at("a", unknown(given(history.Operation{Kind: history.Append, Values: []string{"a", "b"}}, ""))),
		"its records are apart":            at("a b", given(history.Operation{Kind: history.Append, Values: []string{"a", "b"}, Last: "1:1:0"}, "")),
		"positions go down":                downwards(),
		"an incarnation has another base":  at("a", begun(one), as(one, 0, wrote("a", "1:0:0")), history.Operation{Kind: history.Begin, Claim: two, Sequence: -1}, read("a")),
		"it begins elsewhere":              at("a", begun(one), as(one, 0, wrote("a", "1:0:0")), history.Operation{Kind: history.Begin, Claim: claimed(2, 0), Sequence: 0}, read("a")),
		"no read at the end":               {Operations: []history.Operation{wrote("a", "1:0:0")}},
	} {
		if Check(wrong, time.Minute).Why == "" {
			t.Errorf("accepted: %s", name)
		}
	}
}

func TestHistoriesOfACluster(t *testing.T) {
	file, err := os.Open("../testdata/histories.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	err = history.Each(file, func(right *history.History) error {
		if verdict := Check(right, time.Minute); verdict.Why != "" {
			t.Errorf("%s: %s", right.Name, verdict.Why)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
