package spoiler

import (
	"math/rand"
	"os"
	"testing"
	"time"

	"dlog/blackbox/checker"
	"dlog/blackbox/history"
)

const rounds = 20

// Each way finds a place in the histories of a cluster, and nothing that it makes is accepted.
func TestWhatIsSpoiledIsRejected(t *testing.T) {
	file, err := os.Open("../testdata/histories.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	made := map[string]int{}
	err = history.Each(file, func(right *history.History) error {
		random := rand.New(rand.NewSource(right.Seed))
		for range rounds {
			for _, way := range Ways {
				wrong := way.Spoil(right, random)
				if wrong == nil {
					continue
				}
				made[way.Name]++
				if checker.Check(wrong, time.Minute).Why == "" {
					t.Errorf("accepted: %s", wrong.Name)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range Ways {
		if made[way.Name] == 0 {
			t.Errorf("no history has a place where %s", way.Name)
		}
	}
}
