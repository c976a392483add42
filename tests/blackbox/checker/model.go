package checker

import (
	"fmt"
	"slices"
	"strings"

	"dlog/blackbox/history"

	"github.com/anishathalye/porcupine"
)

// record is one in the log: where it is and what it says.
type record struct {
	position history.Position
	value    string
}

// producer is what the log knows of one.
type producer struct {
	last    int64         // the number of its last record
	writer  history.Claim // of the incarnation that wrote it
	granted history.Claim // of the latest incarnation
	grants  int
}

// state is the log at one moment. It is never changed, only copied.
type state struct {
	records  []record
	producer producer // a history has one
	isSealed bool
}

// called is an operation, and which positions its records turned out to have.
type called struct {
	*history.Operation
	positions []history.Position
	start     *history.Position
	end       *history.Position
}

// lastPosition returns where the last record is; "": there is none.
func (log state) lastPosition() string {
	if len(log.records) == 0 {
		return ""
	}
	return log.records[len(log.records)-1].position.String()
}

// step returns whether the log in this state may answer an operation so, and the state after it.
// What is unknown may have its effect, if the state allows it, or else has none.
func step(log state, call called) (bool, state) {
	switch call.Kind {
	case history.Append:
		if call.Outcome == history.Refused {
			return log.mayRefuse(call), log
		}
		return log.append(call)
	case history.Begin:
		return log.begin(call)
	case history.Read:
		return slices.Equal(log.rows(call), call.Rows), log
	case history.Follow:
		rows := log.rows(call)
		return len(rows) >= len(call.Rows) && slices.Equal(rows[:len(call.Rows)], call.Rows), log
	case history.Tail:
		isLast := call.Last == log.lastPosition()
		return isLast && (call.Last == "" || call.LastNumber == int64(len(log.records))-1), log
	case history.Count:
		return call.Count == int64(len(log.records)), log
	case history.Seal:
		if call.Outcome == history.Refused {
			return call.Error == history.Sealed && log.isSealed, log
		}
		log.isSealed = true
		return true, log
	}
	return false, log
}

// append adds records at positions above all others: if the log is not sealed, if the last record is
// where it was expected, and if the producer's numbers go on where they ended.
func (log state) append(call called) (bool, state) {
	if log.isSealed || len(call.positions) != len(call.Values) {
		return false, log
	}
	if call.Conditional && log.lastPosition() != call.Expected {
		return false, log
	}
	if call.Claim != nil {
		if call.Sequence != log.producer.last+1 || !log.mayWrite(*call.Claim) {
			return false, log
		}
		log.producer.last += int64(len(call.Values))
		log.producer.writer = *call.Claim
	}
	log.records = slices.Clone(log.records)
	for at, value := range call.Values {
		position := call.positions[at]
		if count := len(log.records); count > 0 && position.Compare(log.records[count-1].position) <= 0 {
			return false, log
		}
		log.records = append(log.records, record{position, value})
	}
	return true, log
}

// mayWrite returns whether an incarnation may write: the one that wrote last, or one that was granted
// behind the last record and has written nothing yet. With the first record of another one it is
// fenced for good.
func (log state) mayWrite(claim history.Claim) bool {
	return claim == log.producer.writer || claim.Base == log.producer.last+1
}

// mayRefuse returns whether the log's state is a reason to refuse an append.
func (log state) mayRefuse(call called) bool {
	switch call.Error {
	case history.Sealed:
		return log.isSealed
	case history.ConditionFailed:
		return log.lastPosition() != call.Expected && log.lastPosition() == call.Last
	case history.Fenced:
		known := log.producer
		return *call.Claim != known.granted || (*call.Claim != known.writer && known.grants > 1)
	case history.Gap:
		return call.Sequence != log.producer.last+1
	}
	return false
}

// begin grants an incarnation, behind all records of the producer.
func (log state) begin(call called) (bool, state) {
	if call.Outcome == history.Refused {
		return call.Error == history.Sealed && log.isSealed, log
	}
	log.producer.grants++
	if call.Outcome == history.Unknown {
		log.producer.granted = history.Claim{Epoch: -1, Base: call.Call}
		return true, log
	}
	if call.Sequence != log.producer.last || call.Claim.Base != log.producer.last+1 {
		return false, log
	}
	log.producer.granted = *call.Claim
	return true, log
}

// rows returns what a read of a range shows.
func (log state) rows(call called) []history.Row {
	var found []history.Row
	for number, each := range log.records {
		if call.start != nil && each.position.Compare(*call.start) < 0 {
			continue
		}
		if call.end != nil && each.position.Compare(*call.end) >= 0 {
			break
		}
		found = append(found, history.Row{
			Position: each.position.String(), Number: int64(number), Value: each.value,
		})
	}
	return found
}

func equal(one, other state) bool {
	return one.isSealed == other.isSealed && one.producer == other.producer &&
		slices.Equal(one.records, other.records)
}

func initial() interface{} {
	return state{producer: producer{last: -1}}
}

// logModel is a log that does one operation after the other.
var logModel = porcupine.Model{
	Init: initial,
	Step: func(before, input, _ interface{}) (bool, interface{}) {
		return step(before.(state), input.(called))
	},
	Equal: func(one, other interface{}) bool { return equal(one.(state), other.(state)) },
	DescribeOperation: func(input, _ interface{}) string {
		return describe(input.(called))
	},
	DescribeState: func(of interface{}) string {
		log := of.(state)
		var text strings.Builder
		for _, each := range log.records {
			fmt.Fprintf(&text, "%v %s, ", each.position, each.value)
		}
		fmt.Fprintf(&text, "producer %+v, sealed %v", log.producer, log.isSealed)
		return text.String()
	},
}

func describe(call called) string {
	var text strings.Builder
	text.WriteString(call.Kind)
	switch call.Kind {
	case history.Append:
		fmt.Fprintf(&text, " %v", call.Values)
		if call.Conditional {
			fmt.Fprintf(&text, " if last is %q", call.Expected)
		}
		if call.Claim != nil {
			fmt.Fprintf(&text, " by %s as %d", short(call.Claim), call.Sequence)
		}
	case history.Read, history.Follow:
		fmt.Fprintf(&text, " %s…%s", call.Start, call.End)
	}
	if call.Outcome != history.Done {
		return fmt.Sprintf("%s: %s %s %s", text.String(), call.Outcome, call.Error, call.Last)
	}
	switch call.Kind {
	case history.Append:
		fmt.Fprintf(&text, " at %v", call.positions)
	case history.Begin:
		fmt.Fprintf(&text, " %s behind %d", short(call.Claim), call.Sequence)
	case history.Read, history.Follow:
		for _, row := range call.Rows {
			fmt.Fprintf(&text, " %s=%s", row.Position, row.Value)
		}
	case history.Tail:
		fmt.Fprintf(&text, " %q", call.Last)
	case history.Count:
		fmt.Fprintf(&text, " %d", call.Count)
	}
	return text.String()
}

func short(claim *history.Claim) string {
	return fmt.Sprintf("%d/%.6s", claim.Epoch, claim.Token)
}
