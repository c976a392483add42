// Package spoiler makes wrong histories of right ones, each by something that no log may do.
//
// So whoever accepts one of them does not look. A way to spoil says why nothing explains the outcome,
// however the operations overlap; where a history has no place for it, it leaves it alone.
package spoiler

import (
	"encoding/json"
	"math/rand"
	"slices"

	"dlog/blackbox/history"
)

// Way is one kind of wrong.
type Way struct {
	Name  string
	spoil func(*spoiling) bool
}

// Ways are all of them.
var Ways = []Way{
	{"an acknowledged record is missing in a later read", missing},
	{"a record that was read is missing in a later read", forgotten},
	{"an acknowledged record is in no read", lost},
	{"a read shows a record twice", twice},
	{"a record is at two positions", doubled},
	{"a read shows two records in the wrong order", unsorted},
	{"an append comes before one that had ended when it began", reordered},
	{"an acknowledgement tells another position", misplaced},
	{"a read tells another number", misnumbered},
	{"a read shows what no client appended", invented},
	{"an append that was refused is read", unrefused},
	{"a tail is older than an acknowledged append", staleTail},
	{"a count is lower than that of acknowledged records", staleCount},
	{"a count is higher than that of all records", highCount},
	{"two appends succeed on the same condition", bothConditions},
	{"a condition fails that holds", failedCondition},
	{"an append succeeds after its producer was fenced", unfenced},
	{"an append of a producer leaves out a number", gap},
	{"a producer begins before its acknowledged records", staleBegin},
	{"an append succeeds after the log was sealed", unsealed},
}

// spoiling is a copy of a history that is being spoiled.
type spoiling struct {
	*history.History
	random *rand.Rand
}

// Spoil returns a copy of a history that is wrong in this way, nil if there is no place for it.
func (way Way) Spoil(right *history.History, random *rand.Rand) *history.History {
	text, err := json.Marshal(right)
	if err != nil {
		panic(err)
	}
	var copied history.History
	if err := json.Unmarshal(text, &copied); err != nil {
		panic(err)
	}
	if !way.spoil(&spoiling{&copied, random}) {
		return nil
	}
	copied.Name += ", where " + way.Name
	return &copied
}

// final returns the last read, which shows the whole log after all else.
func (spoiled *spoiling) final() *history.Operation {
	return &spoiled.Operations[len(spoiled.Operations)-1]
}

// choose returns one of the operations for which a condition holds, nil if there is none.
func (spoiled *spoiling) choose(holds func(*history.Operation) bool) *history.Operation {
	var found []*history.Operation
	for at := range spoiled.Operations {
		if each := &spoiled.Operations[at]; holds(each) {
			found = append(found, each)
		}
	}
	if len(found) == 0 {
		return nil
	}
	return found[spoiled.random.Intn(len(found))]
}

func isAcknowledged(each *history.Operation) bool {
	return each.Kind == history.Append && each.Outcome == history.Done
}

func isWholeRead(each *history.Operation) bool {
	return each.Kind == history.Read && each.Outcome == history.Done &&
		each.Start == "" && each.End == ""
}

// numberOf returns the number in the log of an append's first record.
func (spoiled *spoiling) numberOf(appended *history.Operation) int64 {
	at := slices.IndexFunc(spoiled.final().Rows, func(row history.Row) bool {
		return row.Value == appended.Values[0]
	})
	return spoiled.final().Rows[at].Number
}

// drop takes a record from a read, as if it had never been there.
func drop(read *history.Operation, value string) {
	at := slices.IndexFunc(read.Rows, func(row history.Row) bool { return row.Value == value })
	read.Rows = slices.Delete(read.Rows, at, at+1)
	for later := at; later < len(read.Rows); later++ {
		read.Rows[later].Number--
	}
	read.Count = 0
}

// end returns a position behind all records.
func (spoiled *spoiling) end() history.Position {
	end := history.Position{1, 0, 0}
	if rows := spoiled.final().Rows; len(rows) > 0 {
		end, _ = history.ParsePosition(rows[len(rows)-1].Position)
		end[1]++
	}
	return end
}

// succeed adds an append that begins when all others have ended, and succeeds, and which the last read
// shows: nothing is wrong with it but that it succeeds.
func (spoiled *spoiling) succeed(added history.Operation) {
	final := spoiled.final()
	position := spoiled.end().String()
	added.Kind, added.Outcome, added.Values, added.Last =
		history.Append, history.Done, []string{"added"}, position
	added.Call, added.Return = final.Call, final.Call+1
	final.Rows = append(final.Rows, history.Row{
		Position: position, Number: int64(len(final.Rows)), Value: "added"})
	final.Call, final.Return, final.Count = final.Call+2, final.Return+2, 0
	spoiled.Operations = slices.Insert(spoiled.Operations, len(spoiled.Operations)-1, added)
}

// A read that begins after an append has ended shows its records.
func missing(spoiled *spoiling) bool {
	appended := spoiled.choose(isAcknowledged)
	if appended == nil {
		return false
	}
	read := spoiled.choose(func(each *history.Operation) bool {
		return isWholeRead(each) && each.Call > appended.Return
	})
	drop(read, appended.Values[spoiled.random.Intn(len(appended.Values))])
	return true
}

// A read that begins after another one has ended shows all that the other one showed.
func forgotten(spoiled *spoiling) bool {
	first := spoiled.choose(func(each *history.Operation) bool {
		return isWholeRead(each) && len(each.Rows) > 0 && each != spoiled.final()
	})
	if first == nil {
		return false
	}
	read := spoiled.choose(func(each *history.Operation) bool {
		return isWholeRead(each) && each.Call > first.Return
	})
	drop(read, first.Rows[spoiled.random.Intn(len(first.Rows))].Value)
	return true
}

func lost(spoiled *spoiling) bool {
	appended := spoiled.choose(isAcknowledged)
	if appended == nil {
		return false
	}
	for at := range spoiled.Operations {
		each := &spoiled.Operations[at]
		if slices.ContainsFunc(each.Rows, func(row history.Row) bool {
			return row.Value == appended.Values[0]
		}) {
			drop(each, appended.Values[0])
		}
	}
	return true
}

// rowOf chooses a read with so many rows at least, and all but the last so many rows of it.
func (spoiled *spoiling) rowOf(count int) (read *history.Operation, at int) {
	read = spoiled.choose(func(each *history.Operation) bool {
		return each.Outcome == history.Done && len(each.Rows) >= count
	})
	if read == nil {
		return nil, 0
	}
	read.Count = 0
	return read, spoiled.random.Intn(len(read.Rows) - count + 1)
}

func twice(spoiled *spoiling) bool {
	read, at := spoiled.rowOf(1)
	if read == nil {
		return false
	}
	read.Rows = slices.Insert(read.Rows, at, read.Rows[at])
	return true
}

func doubled(spoiled *spoiling) bool {
	final := spoiled.final()
	if len(final.Rows) == 0 {
		return false
	}
	row := final.Rows[spoiled.random.Intn(len(final.Rows))]
	row.Position, row.Number = spoiled.end().String(), int64(len(final.Rows))
	final.Rows, final.Count = append(final.Rows, row), 0
	return true
}

func unsorted(spoiled *spoiling) bool {
	read, at := spoiled.rowOf(2)
	if read == nil {
		return false
	}
	read.Rows[at], read.Rows[at+1] = read.Rows[at+1], read.Rows[at]
	return true
}

// Everybody agrees that the one which began later comes first.
func reordered(spoiled *spoiling) bool {
	isAlone := func(each *history.Operation) bool {
		return isAcknowledged(each) && len(each.Values) == 1 && !each.Conditional
	}
	var earlier *history.Operation
	later := spoiled.choose(func(each *history.Operation) bool {
		return isAlone(each) && slices.ContainsFunc(spoiled.Operations, func(other history.Operation) bool {
			return isAlone(&other) && other.Return < each.Call
		})
	})
	if later == nil {
		return false
	}
	earlier = spoiled.choose(func(each *history.Operation) bool {
		return isAlone(each) && each.Return < later.Call
	})
	one, other := earlier.Values[0], later.Values[0]
	for at := range spoiled.Operations {
		each := &spoiled.Operations[at]
		for row := range each.Rows {
			switch each.Rows[row].Value {
			case one:
				each.Rows[row].Value = other
			case other:
				each.Rows[row].Value = one
			}
		}
	}
	earlier.Last, later.Last = later.Last, earlier.Last
	return true
}

func misplaced(spoiled *spoiling) bool {
	appended := spoiled.choose(func(each *history.Operation) bool {
		return isAcknowledged(each) && each.Last != ""
	})
	if appended == nil {
		return false
	}
	position, _ := history.ParsePosition(appended.Last)
	position[spoiled.random.Intn(len(position))]++
	appended.Last = position.String()
	return true
}

func misnumbered(spoiled *spoiling) bool {
	read, at := spoiled.rowOf(1)
	if read == nil {
		return false
	}
	read.Rows[at].Number++
	return true
}

func invented(spoiled *spoiling) bool {
	final := spoiled.final()
	final.Rows, final.Count = append(final.Rows, history.Row{
		Position: spoiled.end().String(), Number: int64(len(final.Rows)), Value: "invented"}), 0
	return true
}

func unrefused(spoiled *spoiling) bool {
	refused := spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Append && each.Outcome == history.Refused
	})
	if refused == nil {
		return false
	}
	final := spoiled.final()
	final.Rows, final.Count = append(final.Rows, history.Row{
		Position: spoiled.end().String(), Number: int64(len(final.Rows)), Value: refused.Values[0]}), 0
	return true
}

// asked chooses an operation of a kind that began after an append had ended, and that append.
func (spoiled *spoiling) asked(kind string) (asked, appended *history.Operation) {
	asked = spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == kind && each.Outcome == history.Done &&
			slices.ContainsFunc(spoiled.Operations, func(other history.Operation) bool {
				return isAcknowledged(&other) && other.Return < each.Call
			})
	})
	if asked == nil {
		return nil, nil
	}
	return asked, spoiled.choose(func(each *history.Operation) bool {
		return isAcknowledged(each) && each.Return < asked.Call
	})
}

func staleTail(spoiled *spoiling) bool {
	tail, appended := spoiled.asked(history.Tail)
	if tail == nil {
		return false
	}
	tail.Last, tail.LastNumber = "", 0
	if before := spoiled.numberOf(appended) - 1; before >= 0 {
		tail.Last, tail.LastNumber = spoiled.final().Rows[before].Position, before
	}
	return true
}

func staleCount(spoiled *spoiling) bool {
	count, appended := spoiled.asked(history.Count)
	if count == nil {
		return false
	}
	count.Count = spoiled.numberOf(appended)
	return true
}

func highCount(spoiled *spoiling) bool {
	count := spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Count && each.Outcome == history.Done
	})
	if count == nil {
		return false
	}
	count.Count = int64(len(spoiled.final().Rows)) + 1
	return true
}

// Once an append was written behind a record, that record is never the last one again.
func bothConditions(spoiled *spoiling) bool {
	first := spoiled.choose(func(each *history.Operation) bool {
		return isAcknowledged(each) && each.Conditional
	})
	if first == nil || spoiled.isSealed() {
		return false
	}
	spoiled.succeed(history.Operation{Conditional: true, Expected: first.Expected})
	return true
}

func failedCondition(spoiled *spoiling) bool {
	refused := spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Append && each.Error == history.ConditionFailed
	})
	if refused == nil {
		return false
	}
	refused.Last = refused.Expected
	return true
}

// isSealed returns whether a client tried to seal the log: then an append that succeeds may be wrong
// for that reason alone.
func (spoiled *spoiling) isSealed() bool {
	return spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Seal
	}) != nil
}

// writes returns whether an operation may have written as a producer.
func writes(each *history.Operation) bool {
	return each.Kind == history.Append && each.Claim != nil && each.Outcome != history.Refused
}

// lastOf returns the last number that a producer may have used.
func (spoiled *spoiling) lastOf(name string) int64 {
	last := int64(-1)
	for at := range spoiled.Operations {
		each := &spoiled.Operations[at]
		if writes(each) && each.Claim.Producer == name && slices.ContainsFunc(
			spoiled.final().Rows, func(row history.Row) bool { return row.Value == each.Values[0] }) {
			last = max(last, each.Sequence+int64(len(each.Values))-1)
		}
	}
	return last
}

// An incarnation is fenced for good when a later one has written after all that it wrote itself.
func unfenced(spoiled *spoiling) bool {
	old := spoiled.choose(func(begun *history.Operation) bool {
		if begun.Kind != history.Begin || begun.Outcome != history.Done {
			return false
		}
		return slices.ContainsFunc(spoiled.Operations, func(later history.Operation) bool {
			return isAcknowledged(&later) && writes(&later) && *later.Claim != *begun.Claim &&
				later.Sequence >= begun.Claim.Base && !slices.ContainsFunc(
				spoiled.Operations, func(own history.Operation) bool {
					return writes(&own) && *own.Claim == *begun.Claim &&
						(own.Outcome == history.Unknown || own.Return >= later.Call)
				})
		})
	})
	if old == nil || spoiled.isSealed() {
		return false
	}
	claim := *old.Claim
	spoiled.succeed(history.Operation{Claim: &claim, Sequence: spoiled.lastOf(claim.Producer) + 1})
	return true
}

func gap(spoiled *spoiling) bool {
	appended := spoiled.choose(func(each *history.Operation) bool {
		return isAcknowledged(each) && each.Claim != nil
	})
	if appended == nil || spoiled.isSealed() {
		return false
	}
	claim := *appended.Claim
	spoiled.succeed(history.Operation{Claim: &claim, Sequence: spoiled.lastOf(claim.Producer) + 2})
	return true
}

func staleBegin(spoiled *spoiling) bool {
	isBefore := func(begun *history.Operation) func(history.Operation) bool {
		return func(each history.Operation) bool {
			return isAcknowledged(&each) && each.Claim != nil && each.Return < begun.Call
		}
	}
	begun := spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Begin && each.Outcome == history.Done &&
			slices.ContainsFunc(spoiled.Operations, isBefore(each))
	})
	if begun == nil {
		return false
	}
	at := slices.IndexFunc(spoiled.Operations, isBefore(begun))
	begun.Sequence = spoiled.Operations[at].Sequence - 1
	return true
}

func unsealed(spoiled *spoiling) bool {
	sealed := spoiled.choose(func(each *history.Operation) bool {
		return each.Kind == history.Seal && each.Outcome == history.Done
	})
	if sealed == nil {
		return false
	}
	spoiled.succeed(history.Operation{})
	return true
}
