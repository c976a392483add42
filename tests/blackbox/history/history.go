// Package history holds the format in which clients of any language write down what they saw.
//
// A history is one line of JSON: all operations of some clients on one log, which was empty before.
// It ends with a read of the whole log, which begins after all clients had ended.
package history

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Kinds of operations.
const (
	Append = "append" // of records, on a condition if Conditional, of a producer if Claim is set
	Begin  = "begin"  // of an incarnation of a producer, which fences those before it
	Read   = "read"   // of all records from Start to before End
	Follow = "follow" // of some records from Start on; more may have been there
	Tail   = "tail"   // where the last record is, and its number
	Count  = "count"  // of all records
	Seal   = "seal"   // after which nothing is appended
)

// Outcomes of operations.
const (
	Done    = "done"
	Refused = "refused" // it has had no effect, for the reason in Error
	Unknown = "unknown" // it may have had its effect, or have it later
)

// Names of errors that refuse an operation because of what the log holds.
const (
	ConditionFailed = "ConditionFailedError"
	Fenced          = "ProducerFencedError"
	Gap             = "SequenceGapError"
	Sealed          = "EndOfStreamError"
)

// Row is a record as a read shows it.
type Row struct {
	Position string `json:"position"`
	Number   int64  `json:"number"` // of the record in its log, from 0
	Value    string `json:"value"`
}

// Claim names an incarnation of a producer; Base is the number from which on it holds.
type Claim struct {
	Producer string `json:"producer"`
	Epoch    int64  `json:"epoch"`
	Base     int64  `json:"base"`
	Token    string `json:"token"`
}

// Operation is a call of one client and its answer. Times are nanoseconds of a monotonic clock.
type Operation struct {
	Client  int    `json:"client"`
	Kind    string `json:"kind"`
	Call    int64  `json:"call"`
	Return  int64  `json:"return"` // without a meaning if the outcome is unknown
	Outcome string `json:"outcome"`
	Error   string `json:"error,omitempty"`
	Note    string `json:"note,omitempty"` // for people: which proxy answered, in what way it was asked

	Values      []string `json:"values,omitempty"`
	Conditional bool     `json:"conditional,omitempty"`
	Expected    string   `json:"expected,omitempty"` // position of the last record; empty: there is none
	Claim       *Claim   `json:"claim,omitempty"`    // of the producer, given or granted
	Sequence    int64    `json:"sequence"`           // of the first value, or of the last record at Begin

	Start string `json:"start,omitempty"`
	End   string `json:"end,omitempty"`
	Rows  []Row  `json:"rows,omitempty"`

	Last       string `json:"last,omitempty"` // position of the last record in the refusal
	LastNumber int64  `json:"last_number"`
	Count      int64  `json:"count"` // of a read by parts too: how many records they were said to have
}

// History is what clients did to one log.
type History struct {
	Name       string      `json:"name"`
	Language   string      `json:"language"`
	Seed       int64       `json:"seed"`
	Operations []Operation `json:"operations"`
}

// Position is where a record is: segment, entry, slot.
type Position [3]int64

// ParsePosition parses what Position.String writes.
func ParsePosition(text string) (position Position, err error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return position, fmt.Errorf("position %q: expected three numbers with colons between", text)
	}
	for at, part := range parts {
		if position[at], err = strconv.ParseInt(part, 10, 64); err != nil {
			return position, fmt.Errorf("position %q: %w", text, err)
		}
	}
	return position, nil
}

func (position Position) String() string {
	return fmt.Sprintf("%d:%d:%d", position[0], position[1], position[2])
}

// Compare returns a negative number if the position comes before the other one, 0 if it is the same.
func (position Position) Compare(other Position) int {
	for at := range position {
		if position[at] != other[at] {
			if position[at] < other[at] {
				return -1
			}
			return 1
		}
	}
	return 0
}

// Each calls for each history of a file.
func Each(file io.Reader, call func(*History) error) error {
	lines := bufio.NewReaderSize(file, 1<<20)
	for number := 1; ; number++ {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var found History
			if err := json.Unmarshal(line, &found); err != nil {
				return fmt.Errorf("line %d: %w", number, err)
			}
			if err := call(&found); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
